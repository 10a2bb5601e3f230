"""Given names and surnames for lists of people."""

_GIVEN = """
    Aaron Adele Agnes Albert Alma Amos Anita Anton Astrid Bella Bernard Bianca Bruno Camille Carmen Cecil Celia
    Clement Conrad Daisy Damian Daphne Delia Dexter Doris Edgar Edwin Elena Elias Elsa Enid Ernest Esther Fabian Felix
    Flora Floyd Frida Gareth Gemma Gilbert Gloria Gordon Greta Harold Hazel Hector Heidi Hilda Horace Ingrid Iris Isaac
    Ivy Jasper Jerome Joan Jonas Judith Julius Kirk Lana Lars Leon Lydia Mabel Marcus Martha Milo Miriam Mona Nadia
    Neil Nigel Norma Olive Oscar Otto Paula Pearl Percy Petra Rupert Ruth Selma Silas Stella Sven Tessa Thelma Victor
    Viola Wanda Wesley Winston Yvonne"""
GIVEN = tuple(_GIVEN.split())
_SURNAMES = """
    Abbott Acosta Aldridge Appleby Archer Ashby Atwood Baird Bancroft Barlow Barrow Baxter Beckett Benson Birch
    Blackwell Blanchard Boone Bowen Bradshaw Brandt Brennan Briggs Buckley Burgess Calloway Camden Carver Castillo
    Chandler Chavez Clayton Coleman Conway Corbett Crawford Croft Cutler Dalton Darby Davenport Dawson Delgado Denton
    Dixon Dorsey Draper Drake Dudley Duffy Eaton Eckert Ellison Emery Fairfax Farrell Fenton Finch Fleming Forrest
    Foster Fowler Franco Frost Fuller Gallagher Gardner Garrett Gibbs Glover Goodwin Grady Granger Gustafson Hadley
    Hale Hammond Hanley Hardin Harlow Hartman Hawkins Hayward Heath Hendrix Herman Hobbs Holden Holloway Hooper Horton
    Hubbard Huxley Ibarra Ingram Irving Jennings Jensen Joyner Kaplan Keating Keller Kendall Kirby Knight Kramer
    Lambert Larkin Lawson Leblanc Lockhart Lowell Lyons Maddox Mallory Marlow Mayfield McCoy Meadows Mercer Merritt
    Middleton Monroe Morrow Mullins Nash Newell Nixon Norwood Oakley Ogden Osborne Pacheco Palmer Parrish Paxton
    Pemberton Pickett Porter Prescott Proctor Quigley Radford Ramsey Randall Redmond Reeves Rhodes Riggs Rowland
    Salinas Sawyer Schmitt Sexton Shepherd Sinclair Slater Sloan Snyder Sparks Stafford Stanton Sterling Sutton Talbot
    Tanner Thornton Townsend Tucker Underhill Valdez Vaughn Vickers Wadsworth Walden Warner Watkins Webster Whitaker
    Wilder Winslow Woodard Wyatt Yates York Zamora Zimmer"""
SURNAMES = tuple(_SURNAMES.split())
