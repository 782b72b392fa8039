"""The certificate of ``check``, and the proof that a step makes before it first splits a batch.

To be read in this order: ``proving`` says when a split is proved, and when again. ``cuts`` chooses samples, ``trial``
runs them on the model itself and puts everything back, and ``proof`` goes from one comparison to the next; beside it
stand ``replaying`` (all samples of a first batch, from what the model gave for them), ``elsewhere`` (what later batches
may have), ``chunks`` (of time) and ``together`` (a model that lies in parts). Where a comparison finds a difference,
``examination`` makes the certificate: ``rig`` runs and compares copies of the model in float64, and ``searches``,
``averages`` and ``state`` look for the cause, which ``causes`` words.
"""
