def account(*a):
    return {}


def show(*a):
    pass
