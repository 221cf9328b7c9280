"""From a question to an answer: options resolved into a recipe, an engine chosen, its timeline replayed."""
