"""Training that resumes where an earlier run stopped."""
