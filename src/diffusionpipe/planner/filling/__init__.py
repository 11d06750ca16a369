"""Places frozen work of the next batch in the waits of an iteration."""
