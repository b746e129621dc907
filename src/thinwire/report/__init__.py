"""Plots and the HTML page of results.

What does not live here: measuring (measure/, bench/).
"""
