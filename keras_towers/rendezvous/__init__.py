"""The ranks of a job find, watch and compare one another here."""
