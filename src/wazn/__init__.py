"""wazn: how much GPU memory a fine-tuning run of a language model will need."""
