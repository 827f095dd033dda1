"""The conformance kit: does a backend keep what :mod:`deepinfer.api.backend` promises?

``pytest --pyargs deepinfer.testing.conformance --backend NAME``

For authors of plugins; it needs pytest and the installed backend, nothing else. Each promise is a
test with a name of its own, so what fails says what is wrong:

- ``test_hygiene``: importing the plugin's window changes nothing in its host.
- ``test_backend``: probe, facts, device, what is provided.
- ``test_ops``: every op of the table against its reference, on the inputs of ``inputs.py``.
- ``test_rows``: a row's result does not depend on other rows; bit for bit where that is claimed.
- ``test_paging``: KV in permuted pages, slots of −1, pages of others.
- ``test_sampling``: draws follow the distribution; masks and a padded vocabulary.
- ``test_quantized``: int8 and FP8 weights, where offered.
- ``test_engine``: a tiny model through ``LLM``: abort, preemption, prefix cache, leaks.

Options: ``--backend NAME``, ``--device N`` (which of several devices to open), ``--dtype`` (may be
repeated; all that the backend names, otherwise), ``--badge FILE`` (the result as JSON). The last
lines say the level that was reached (``level.py``).
"""
