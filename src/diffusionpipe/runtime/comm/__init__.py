"""Messages between ranks: transports over processes and threads, and the groups that meet."""
