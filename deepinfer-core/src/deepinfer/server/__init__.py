"""The HTTP server: ``python -m deepinfer.server`` or ``deepinfer serve``.

Where you are: outside the front doors. ``lifecycle`` runs the program, ``app`` puts the routes
together, ``service`` stands between a route and the engine; each dialect (``generate``, ``openai``,
``responses``, ``messages``) is a translation in and an answer out. Nothing here is imported unless
the command runs.
"""
