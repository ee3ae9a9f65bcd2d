"""The formats people have, one room each, and what tells them apart."""
