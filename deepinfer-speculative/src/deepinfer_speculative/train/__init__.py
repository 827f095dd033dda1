"""Training of DSpark drafts: ``python -m deepinfer_speculative.train --help``.

In order: ``answers`` lets the target write texts through the engine, ``target`` recomputes its
hidden states, ``data`` puts texts and states into batches of anchors, ``network`` is the draft in
plain torch, ``losses`` what is minimised (spec 6.1), ``loop`` the steps, ``evaluate`` what came of
it. Each stage leaves a file in the output folder and is skipped where that file is there.
"""
