"""How the ranks of a job find, watch and check one another."""
