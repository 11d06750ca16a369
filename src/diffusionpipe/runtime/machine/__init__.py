"""The machine of a rank: cores, memory, uploads, determinism, and the file of an error."""
