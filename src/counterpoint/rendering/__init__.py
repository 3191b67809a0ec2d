"""Render results, one file per subcommand and medium, from records alone; no figures are computed in this package.

table.py holds a table once, and print_table.py, its `markdown` and page/parts.html show it. formatting.py says how
numbers look everywhere, safe_html.py writes pages on which names from a trace stay plain text (templates and scripts
are in page/), and files.py writes files that appear whole or not at all.
"""
