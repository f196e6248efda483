"""Messages between ranks, and the processes that ranks are."""
