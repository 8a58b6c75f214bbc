"""How an analysis is shown: sentences, charts and the page. Nothing here computes."""
