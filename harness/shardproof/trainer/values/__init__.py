"""What two values of a trainer have in common, and what sets them apart: bit for bit, by a factor, by rounding, by
a name; and the sentences that say it."""
