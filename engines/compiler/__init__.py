"""From a traced model and a plan to the program of each rank."""
