"""Not a GPT-2: an LSTM language model."""

from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nlayers):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, ninp, nlayers, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(ninp, ntoken)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids):
        output, _ = self.rnn(self.drop(self.encoder(ids)))
        return self.decoder(self.drop(output))
