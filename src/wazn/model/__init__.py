"""The architecture: the spec (frozen nouns), Hugging Face configurations read into it, every weight counted."""
