"""Problems: where they come from, how they become prompts, in which order they are asked.

`settings` says what can be set, `datasets` reads rows, `templates` makes token ids, `prompts` joins
the two, `loader` deals them out step by step. Imports nothing on its own.
"""
