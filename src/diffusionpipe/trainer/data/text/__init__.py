"""Makes the texts and the tokens that an encoder reads of captions."""
