"""Does a precision policy cost accuracy? Paired runs in bf16 and in the policy."""
