"""Built-in models, rows compared side by side, the rank worker that times them, tables and plots.

Links and launching belong to tools/lab/ (a launcher is passed in), methods to core/methods/, verbs to tools/cli/.
"""
