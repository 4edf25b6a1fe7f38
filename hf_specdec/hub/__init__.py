"""From the Hugging Face Hub or a folder to a drafter, by what the files are. Publishing is a method of the drafter."""
