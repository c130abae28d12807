"""Problems: where they come from, how they become prompts, in which order they are asked."""
