"""What a rank does for the notebook: the server, and the functions that the notebook calls."""
