"""Reading files that others wrote and writing files that are whole or not there at all."""
