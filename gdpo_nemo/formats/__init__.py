"""Models in other programs' formats: made into Hugging Face folders. No Ray."""
