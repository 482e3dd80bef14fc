"""What holds while an engine calls its model, and is undone behind it: settings, forwards, kept gradients."""
