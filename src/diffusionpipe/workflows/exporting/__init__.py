"""Models of runs in other forms: one file, 8 or 4 bits; prototypes of classes."""
