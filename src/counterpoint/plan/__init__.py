"""What a job would take on other machines, and where its ranks should be put; from formulas and measured constants."""
