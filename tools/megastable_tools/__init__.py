"""What one runs at a desk: corpora, forensics, conversion, plans, studies. megastable never imports it."""
