"""How the model that ships with edgemoe is made: text, tokenizer, network, training, export."""
