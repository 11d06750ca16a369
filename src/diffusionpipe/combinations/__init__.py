"""Features of a training that exclude each other, and the reasons that users are told."""
