"""What the HTTP API promises: models of its answers, and the OpenAPI description made of them and of the routes.

Nothing here runs when a call is answered: routes answer plain dicts, and tests hold them to this. Not here: models of
requests, which the routes check (`api.models`).
"""
