"""Replicas that do not wait for each other: for study."""
