"""Asynchronous replicas, for study: replicas that do not wait for each other."""
