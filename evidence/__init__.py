"""Public measurements of training memory, rehearsed with the library versions under which they were made.

    measured.jsonl       what others measured and published, one run a line, with its source
    environments.toml    the versions behind each source
    rehearsed.jsonl      what the rehearsal of each row came to; `scripts/rehearse_evidence` writes it
    explained.toml       rows that need a word: what the real code did, and how that is known

The modules import no torch; only `worker`, which runs inside an environment of its own, does.
"""
