"""Models in other programs' formats: made into Hugging Face folders, and written from them. No Ray."""
