"""Names of the original documents whose home has moved. Thin: each points to what does the work today."""
