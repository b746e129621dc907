"""One self-contained HTML page of results: plans, comparisons, timelines, curves, read from the JSON of the verbs.

Measuring belongs to predict/measure/ and tools/bench/, predicting to core/pricing/. Nothing is imported here, since
``thinwire.StepLog`` lies here too, which is for trainings.
"""
