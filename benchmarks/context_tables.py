def show(rows, pairs): pass
