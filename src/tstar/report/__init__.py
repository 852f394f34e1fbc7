"""What people look at: one HTML file, figures and tables for a paper, and the same page live.

::

    sources.py   what lies on disk: runs, evaluations, trajectories; tells what is missing, never fails for it
    lines.py     some lines out of very many
    content.py   what the report says, as one record: everything below only shows it
    schedules.py responses to look at, and figures over their schedules
    verdict.py   the header's sentences
    page.py      the HTML file       tables.py  LaTeX, Markdown
    watch.py     the live page       figures.py PDF, SVG, PNG

It imports no torch: a report is made where the runs were copied to.
"""
