"""To and from the Hugging Face Hub: loading drafters by what their files are, and publishing them with a card."""
