"""What a program computes of a row: operators in what is written out, and cheaper equations for them."""
