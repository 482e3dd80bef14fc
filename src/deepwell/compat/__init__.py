"""Names of the first documents whose home has moved. Thin: each points to what does the work today."""
