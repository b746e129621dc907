"""Built-in models, rows compared side by side, the rank worker that times them, tables and plots.

Links and launching belong to lab/ (a launcher is passed in), methods to methods/, command-line verbs to cli/.
"""
