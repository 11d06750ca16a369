"""What training without a flush learns, and how long it takes."""
