"""`deepwell bench moe`: blocks of experts and whole steps of MoE models beside their peers."""
