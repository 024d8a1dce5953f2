"""Training straight from text: units of a store are made in the background, in the order in which loaders need them.

opening      `milldam.open(INPUTS, tokenizer=..., store=...)`: what is asked for, and what can't be
maker        a process that does the job of `milldam tokenize`, unit by unit as they are wanted; it has the run's lock
making       the maker as loaders see it: started, watched, replaced when it dies
demand       which units loaders wait for, as files of the run folder
made         the run's records, read while they are written
growing      the parts of a store that is being made, as `loader.parts` wants them

Ranks share a run folder and nothing else: whoever gets the lock has the maker, the others read what it makes. No rank
waits for another one, only for units.
"""
