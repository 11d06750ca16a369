"""Starting the ranks of a run and ending them: signals, restarts, exit statuses, the lock of its folder."""
