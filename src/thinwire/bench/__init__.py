"""Built-in models, rows compared side by side, the rank worker that times them, tables and plots.

What does not live here: links and launching (lab/; a launcher is passed in), methods (methods/), the verbs (cli/).
"""
