"""How templates are made: what warms a booted machine, how it is frozen and published.

Not here: which templates there are (`engine.templates`), what they are made of (`images`).
"""
